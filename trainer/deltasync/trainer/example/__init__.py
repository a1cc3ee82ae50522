"""An example to copy: a click model that trains online, a predictor that follows it, and a demo that runs both.

The files are numbered in reading order: `options`, `stream`, `features`, `model`, `train` (a rank of the trainer),
`results`, `replica`, `processes`, `run`, `report`, `poison`, `demo`, `predictor`.
"""
