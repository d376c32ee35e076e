if __name__ != "tidegate.infra":
    raise ImportError(f"import tidegate.infra, not {__name__}")
