"""The one door to Airflow's internals. No other module of `operators` imports them.

Airflow promises to keep what is in `airflow.sdk`, its triggers, its plugins and its providers.
Everything else may change in any release, so it is here, and `internals.toml` says why each part
is needed. tests/operators/test_airflow_port.py compares it with the Airflow that is installed.
Before a new Airflow is allowed, read that test's list.

    database       the page: DAGs, runs, questions and permissions
    task_marks     the listener: marks of people, in the API server
    running_tasks  a trigger that is ended: in what state its task is
    page_access    the page: who asks

This module imports nothing, because triggers and every DAG file load the package.
"""
