"""Certificates of our own for servers on loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, certificates: Path) -> Path:
    """A CA of our own, whose file it gives, and a key and certificate of its making for loopback."""
    certificates.mkdir()
    ca, key, asked = folder / "ca.pem", folder / "ca.key", folder / "server.csr"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (
        f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ours -keyout {key} -out {ca}",
        (
            f"req -newkey rsa:2048 -nodes -subj /CN=server -keyout {certificates / 'private.key'}"
            f" -out {asked}"
        ),
        (
            f"x509 -req -in {asked} -CA {ca} -CAkey {key} -CAcreateserial -days 2 -extfile"
            f" {folder / 'names'} -out {certificates / 'public.crt'}"
        ),
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True, timeout=240)
    return ca
