"""The sync service, its command line, and the client library for trainers and predictors."""
