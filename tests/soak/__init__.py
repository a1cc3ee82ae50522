"""Trainers, the service and replicas under a schedule of faults, and what is left of rows."""
