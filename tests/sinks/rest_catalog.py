"""A real Iceberg REST catalog on loopback, for tests.

Iceberg's own handlers under Jetty, over SQLite, from Maven's artifacts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from tidegate.infra.local_processes import LOOPBACK, choose_free_port

ARTIFACTS: Final = (
    "org.apache.iceberg:iceberg-core:1.10.0",
    "org.apache.iceberg:iceberg-core:1.10.0:tests",  # the handlers behind HTTP
    "org.eclipse.jetty:jetty-servlet:11.0.26",
    "org.xerial:sqlite-jdbc:3.50.3.0",
    "org.slf4j:slf4j-nop:2.0.17",
)


class RestCatalogServer:
    """One server in a small JVM of its own, driven through py4j."""

    def __init__(self, jars: list[Path], folder: Path) -> None:
        own = Path(pyspark.__file__).parent / "jars"
        hadoop = [*own.glob("hadoop-client-*.jar")]
        (py4j,) = own.glob("py4j-*.jar")
        classpath = ":".join(map(str, [*jars, *hadoop]))
        port, token, self._process = launch_gateway(
            jarpath=str(py4j),
            classpath=classpath,
            die_on_exit=True,
            enable_auth=True,
            javaopts=["-Xmx256m"],
            return_proc=True,
        )
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True)
        )
        self._database = f"jdbc:sqlite:{folder / 'rest.sqlite'}"
        self._warehouse = (folder / "warehouse").as_uri()
        self.port = choose_free_port()
        self.address = f"http://{LOOPBACK}:{self.port}/"
        self._server: Any = None

    def start(self) -> None:
        """Listen."""
        jvm: Any = self._gateway.jvm
        iceberg, jetty = jvm.org.apache.iceberg, jvm.org.eclipse.jetty
        settings = {
            "uri": self._database,
            "warehouse": self._warehouse,
            "jdbc.schema-version": "V1",
        }
        settings["catalog-impl"] = "org.apache.iceberg.jdbc.JdbcCatalog"
        catalog = iceberg.CatalogUtil.buildIcebergCatalog(
            "backend", settings, jvm.org.apache.hadoop.conf.Configuration()
        )
        context = jetty.servlet.ServletContextHandler()
        servlet = iceberg.rest.RESTCatalogServlet(iceberg.rest.RESTCatalogAdapter(catalog))
        context.addServlet(jetty.servlet.ServletHolder(servlet), "/*")
        self._server = jetty.server.Server(jvm.java.net.InetSocketAddress(LOOPBACK, self.port))
        self._server.setHandler(context)
        self._server.start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.stop()

    def close(self) -> None:
        """End the JVM."""
        self._gateway.shutdown()
        # py4j's own thread reads and closes its standard output, so `communicate` must not.
        self._process.stdin.close()
        self._process.wait(timeout=60)
