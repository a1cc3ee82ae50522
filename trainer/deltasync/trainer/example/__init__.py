"""An example to copy: a click model that trains online, a predictor that follows it, and a demo that runs both."""
