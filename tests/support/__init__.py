"""Support code that several tests share."""
