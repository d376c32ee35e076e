if __name__ != "tidegate.expectations":
    raise ImportError(f"import tidegate.expectations, not {__name__}")
