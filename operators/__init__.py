if __name__ != "tidegate.operators":
    raise ImportError(f"import tidegate.operators, not {__name__}")
