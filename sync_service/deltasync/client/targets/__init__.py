"""Where replicas put rows: arrays, torch modules, tables by raw id, Redis."""
