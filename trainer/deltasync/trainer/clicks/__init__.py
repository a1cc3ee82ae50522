"""The click model, the events that train it, and the options of its trainer."""
