"""The local stack: MinIO and Airflow as plain processes on 127.0.0.1, and the flights feed."""

if __name__ != "tidegate.infra":
    raise ImportError(f"import tidegate.infra, not {__name__}")
