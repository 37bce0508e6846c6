"""`pipeplan serve` as its operator sees it: what it writes on standard error, and how it ends."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import httpx

from pipeplan.documents.files import dump
from planner_service.overview.openapi import CLUSTER
from tests.planner_service.servers import PIPEPLAN, announced_url, environment, forked, served
from tests.waiting import PATIENCE_S


def test_every_request_is_a_line_of_json_where_nobody_looks(tmp_path: Path) -> None:
    with forked(tmp_path / "service.sqlite3") as (url, service):
        httpx.get(f"{url}/v1/plans/nothing", headers={"X-Request-ID": "ci-17"})
        status, stderr = service.terminated()
    assert status == 0
    lines = [json.loads(line) for line in stderr.splitlines()]
    (request,) = [line for line in lines if line["event"] == "request"]
    assert (request["route"], request["status"], request["request_id"]) == ("/v1/plans/{plan_id}", 404, "ci-17")
    assert request["caller"] == "local"


def test_where_json_is_asked_for_every_line_is(tmp_path: Path) -> None:
    settings = {"PIPEPLAN_LOG_FORMAT": "json", "PIPEPLAN_LOG_LEVEL": "error"}
    with forked(tmp_path / "service.sqlite3", **settings) as (url, service):
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert service.terminated() == (0, "")


def test_plain_text_says_who_asked_for_what(tmp_path: Path) -> None:
    with forked(tmp_path / "service.sqlite3", "--log-format", "human") as (url, service):
        httpx.get(f"{url}/healthz", headers={"X-Request-ID": "r-5"})
        _, stderr = service.terminated()
    assert "info    request request_id=r-5 method=GET route=/healthz status=200" in stderr


def test_what_is_under_way_ends_before_the_service_does(tmp_path: Path) -> None:
    with forked(tmp_path / "service.sqlite3") as (url, service):
        host, port = url.removeprefix("http://").split(":")
        body = dump(CLUSTER).encode()
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            head = f"POST /v1/clusters HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
            httpx.get(f"{url}/healthz")  # by now the request above has been read, too
            assert service.terminated(0.3) == (None, "")
            connection.sendall(body[10:])
            answer = connection.recv(4096)
        service.process.join()
        assert service.process.exitcode == 0
    assert answer.startswith(b"HTTP/1.1 201")


def test_what_takes_longer_than_it_may_is_cut_off(tmp_path: Path) -> None:
    with forked(tmp_path / "service.sqlite3", PIPEPLAN_SHUTDOWN_S="1") as (url, service):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            head = f"POST /v1/clusters HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n".encode())
            httpx.get(f"{url}/healthz")
            assert service.terminated()[0] == 0


def test_a_log_that_nobody_reads_does_not_stop_the_service(tmp_path: Path) -> None:
    """The pipe of standard error holds 64 KiB: with lines written by the event loop the service would hang."""
    with served(tmp_path / "service.sqlite3") as url, httpx.Client(base_url=url) as client:
        statuses = {client.get("/healthz", headers={"X-Request-ID": "x" * 64}).status_code for _ in range(500)}
    assert statuses == {200}


def test_a_service_takes_its_settings_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pipeplan.toml"
    path.write_text(f"port = 0\ndatabase_url = 'sqlite:///{tmp_path}/s.sqlite3'\nlog_format = 'json'\n", "utf-8")
    command = [*PIPEPLAN, "serve", "--config", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        url = announced_url(process)
        assert httpx.get(f"{url}/readyz").status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0
    assert (tmp_path / "s.sqlite3").exists()
