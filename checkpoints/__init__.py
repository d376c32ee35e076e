if __name__ != "tidegate.checkpoints":
    raise ImportError(f"import tidegate.checkpoints, not {__name__}")
