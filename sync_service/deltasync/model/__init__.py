"""The sources of replicas' rows: models, and the interface that models and views share. Internal."""
