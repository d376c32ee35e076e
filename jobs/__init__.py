if __name__ != "tidegate.jobs":
    raise ImportError(f"import tidegate.jobs, not {__name__}")
