"""Debian's nginx before the service, with the configuration of the documentation: TLS, a base path, streams, bodies."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from planner_service.overview.openapi import PROFILE
from tests.planner_service.examples import PROFILE_TASK
from tests.planner_service.servers import pipeplan, served
from tests.waiting import PATIENCE_S

NGINX, OPENSSL = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"), shutil.which("openssl")
DOCUMENTED = Path(__file__).parents[3] / "docs" / "nginx.conf"
NAME = "plans.example.org"
FAILURES = 5
HTML = {"Accept": "text/html"}

pytestmark = [
    pytest.mark.each_case,
    pytest.mark.skipif(NGINX is None or OPENSSL is None, reason="nginx or openssl is not installed"),
]

MAIN = """
daemon off;
user root;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/pipeplan.conf;
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The service as it is reached through nginx."""

    port: int
    plain_port: int
    verified: ssl.SSLContext
    token: str

    @contextmanager
    def client(self, source: str = "127.0.0.1") -> Iterator[httpx.Client]:
        """A client at an address of this machine, which asks for the service by its name."""
        transport = httpx.HTTPTransport(local_address=source, verify=self.verified)
        headers = {"Host": f"{NAME}:{self.port}"}
        url = f"https://127.0.0.1:{self.port}/pipeplan"
        with httpx.Client(base_url=url, headers=headers, transport=transport, timeout=PATIENCE_S) as client:
            yield client

    @property
    def bearer(self) -> dict[str, str]:
        """The headers of a caller with a token."""
        return {"Authorization": f"Bearer {self.token}"}


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """A service that demands tokens, under a path, behind nginx with a certificate of its own."""
    folder = tmp_path_factory.mktemp("nginx")
    database = folder / "service.sqlite3"
    _make_certificate(folder)
    made = ("token", "create", "--name", "team", "--scope", "plan", "--database", f"sqlite:///{database}")
    token = pipeplan(*made).stdout.strip()
    settings = {
        "PIPEPLAN_BASE_PATH": "/pipeplan",
        "PIPEPLAN_ALLOWED_HOSTS": NAME,
        "PIPEPLAN_FAILED_TOKENS_PER_MIN": str(FAILURES),
    }
    with served(database, **settings) as url, _free_port() as plain, _free_port() as encrypted:
        plain_port, port = plain.getsockname()[1], encrypted.getsockname()[1]
        _configure(folder, service=urlsplit(url).netloc, plain=plain_port, encrypted=port)
        plain.close()
        encrypted.close()
        with _running(folder):
            verified = ssl.create_default_context(cafile=str(folder / "pipeplan.crt"))
            yield Behind(port=port, plain_port=plain_port, verified=verified, token=token)


def _make_certificate(folder: Path) -> None:
    names = f"subjectAltName=DNS:{NAME},IP:127.0.0.1"
    files = ("-keyout", str(folder / "pipeplan.key"), "-out", str(folder / "pipeplan.crt"))
    request = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}", "-addext", names)
    subprocess.run((str(OPENSSL), *request, *files), check=True, capture_output=True)


@contextmanager
def _free_port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _configure(folder: Path, *, service: str, plain: int, encrypted: int) -> None:
    """The documented file, with addresses and paths of the test."""
    text = DOCUMENTED.read_text()
    changes = {
        "listen 80;": f"listen 127.0.0.1:{plain};",
        "listen 443 ssl;": f"listen 127.0.0.1:{encrypted} ssl;",
        "server 127.0.0.1:8437;": f"server {service};",
        "/etc/ssl/": f"{folder}/",
    }
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    (folder / "pipeplan.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))


@contextmanager
def _running(folder: Path) -> Iterator[None]:
    command = (str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"))
    checked = subprocess.run((*command, "-t"), capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(10_000):
            if (folder / "pid").exists() and (folder / "pid").read_text().strip():
                break
        yield
    finally:
        process.terminate()
        process.wait()


def test_what_comes_in_the_clear_is_led_to_tls(behind: Behind) -> None:
    url = f"http://127.0.0.1:{behind.plain_port}/pipeplan/plans?sort=-throughput"
    answer = httpx.get(url, headers={"Host": NAME})
    assert (answer.status_code, answer.headers["Location"]) == (
        301,
        f"https://{NAME}/pipeplan/plans?sort=-throughput",
    )


def test_a_browser_logs_in_and_keeps_a_secure_cookie_for_the_path(behind: Behind) -> None:
    with behind.client() as client:
        asked = client.get("/plans", headers=HTML)
        assert asked.status_code == 401
        assert 'action="/pipeplan/login"' in asked.text
        assert asked.headers["Strict-Transport-Security"].startswith("max-age=")
        form = {"token": behind.token, "next": "/plans"}
        opened = client.post("/login", data=form, headers={"Origin": f"https://{NAME}:{behind.port}"})
        assert (opened.status_code, opened.headers["Location"]) == (303, "/pipeplan/plans")
        cookie = opened.headers["Set-Cookie"]
        assert {"Secure", "HttpOnly", "Path=/pipeplan/", "SameSite=strict"} <= set(re.split(r";\s*", cookie))
        session = {"Cookie": cookie.partition(";")[0]}
        page = client.get("/plans", headers=HTML | session)
        assert page.status_code == 200
        for address in re.findall(r'(?:href|src)="(/[^"]*)"', page.text):
            assert address.startswith("/pipeplan/")
        style = client.get("/static/pipeplan.css")
        assert style.headers["Content-Type"].startswith("text/css")
        foreign = client.post("/example", headers=session | {"Origin": "https://elsewhere.example"})
        assert foreign.status_code == 403


def test_events_come_while_they_happen(behind: Behind) -> None:
    """A stream that nginx kept back would not show the first event before the last, which this waits for."""
    with behind.client() as client:
        task = PROFILE_TASK.model_dump(mode="json")
        job = client.post("/v1/jobs", json=task, headers=behind.bearer).json()["id"]
        with client.stream("GET", f"/v1/jobs/{job}/events", headers=behind.bearer) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith("event:")) == "event: queued"
            client.post(f"/v1/jobs/{job}/cancel", headers=behind.bearer).raise_for_status()
            assert next(line for line in lines if line.startswith("event:")) == "event: cancelled"


def test_nginx_lets_large_bodies_through(behind: Behind) -> None:
    large = replace(PROFILE, blocks=tuple(replace(PROFILE.blocks[0], name=f"{n:0600d}") for n in range(3000)))
    with behind.client() as client:
        answer = client.post("/v1/profiles", json=asdict(large), headers=behind.bearer)
    assert len(answer.request.content) > 2 * 2**20
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"].startswith("/pipeplan/v1/profiles/")


def test_limits_are_of_the_address_behind_the_proxy_which_nobody_can_choose(behind: Behind) -> None:
    wrong = {"Authorization": "Bearer ppl_wrong"}
    with behind.client("127.0.0.3") as guesser, behind.client("127.0.0.4") as other:
        statuses = [guesser.get("/v1/jobs", headers=wrong).status_code for _ in range(FAILURES + 2)]
        assert statuses[0] == 401
        assert statuses[-1] == 429
        pretending = wrong | {"X-Forwarded-For": "203.0.113.9"}
        assert guesser.get("/v1/jobs", headers=pretending).status_code == 429
        assert other.get("/v1/jobs", headers=wrong).status_code == 401
