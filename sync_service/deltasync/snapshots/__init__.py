"""Snapshots of models outside of the service: in a folder, or in object storage. Internal."""
