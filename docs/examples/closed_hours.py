"""An Airflow DAG that runs once for every hour that the stream `flights` has closed.

The pipeline says `supervision: {announce: 1h}`; copy this file into the DAGs folder.
"""

from datetime import datetime, timedelta

from airflow.sdk import DAG, PartitionedAssetTimetable, task

from tidegate.operators.assets import window_asset

with DAG(
    "closed_hours",
    schedule=PartitionedAssetTimetable(assets=window_asset("flights", "per_carrier_hour")),
    catchup=False,
) as dag:

    @task
    def report(dag_run=None):
        """The hour is in the partition key.

        The window's rows are in the table `flights.per_carrier_hour`.
        """
        start = datetime.fromisoformat(dag_run.partition_key)
        print(f"window_start from {start} to {start + timedelta(hours=1)}")

    report()
