import sys

if __name__ != "tidegate.jobs":
    raise ImportError(f"import tidegate.jobs, not {__name__}")
__path__ += [f"{entry}/tidegate/jobs" for entry in sys.path if str(entry).endswith(".whl")]
