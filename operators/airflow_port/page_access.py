"""Who asks for the page, and whether they may: Airflow's own guards of routes."""

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import (
    GetUserDep,
    requires_access_dag,
    requires_access_view,
)
from fastapi import Depends

__all__ = ["REQUIRE_SITE_ACCESS", "REQUIRE_STREAM_ACCESS", "GetUserDep"]

REQUIRE_SITE_ACCESS = Depends(requires_access_view(AccessView.WEBSITE))
REQUIRE_STREAM_ACCESS = Depends(requires_access_dag("GET"))
