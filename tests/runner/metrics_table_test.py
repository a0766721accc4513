from spopp_jax import types
from spopp_jax.runner import metrics_table


def test_every_metric_is_described():
  for name, metric in metrics_table.METRICS.items():
    assert all(metric), name
    assert f'| {name} | ' in metrics_table.describe_metrics()
  for status in types.Status:
    assert f'status/{status.name.lower()}' in metrics_table.METRICS
