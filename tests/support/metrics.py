"""What /metrics exposes."""

# Each metric and its labels: what dashboards and alerts are built on.
METRICS: dict[str, set[str]] = {
    "deltasync_head_version": {"model"},
    "deltasync_consumer_lag_versions": {"consumer"},
    "deltasync_consumer_lag_rows": {"consumer"},
    "deltasync_consumer_lag_bytes": {"consumer"},
    "deltasync_consumer_lag_seconds": {"consumer"},
    "deltasync_consumer_replicas": {"consumer", "state"},
    "deltasync_published_rows_total": {"model"},
    "deltasync_published_bytes_total": {"model"},
    "deltasync_released_rows_total": {"consumer"},
    "deltasync_released_bytes_total": {"consumer"},
    "deltasync_table_rows": {"model", "table"},
    "deltasync_table_bytes": {"model", "table"},
    "deltasync_log_bytes": set(),
}
