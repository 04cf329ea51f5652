"""Certificates for tests of TLS."""

import shutil
import subprocess

import pytest


def make_certificate(folder):
    """Write a certificate of localhost and its key into a folder. Return both files."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    cert = folder / "cert.pem"
    key = folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*make, "-keyout", key, "-out", cert, "-days", "2", *subject], check=True, capture_output=True)
    return str(cert), str(key)
