"""Jobs on Kubernetes: settings from every source, manifests, wrong settings refused, and kubectl as the command that submits them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hasten.cli.launch_cmd import main, make_parser
from hasten.config import handoff
from hasten.config.files import read
from hasten.config.resolve import Resolved, resolve
from hasten.errors import ConfigError, LaunchError
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, Target
from hasten.launch.job import make_plan, prepare

REPOSITORY: Final = Path(__file__).parents[3]
BASE: Final = ("--submit=kubernetes", "--kubernetes_image=registry.example/train:1")


def plan_of(resolved: Resolved, *args: str) -> LaunchPlan:
    """The plan of a script under these settings."""
    launch = resolved.config.launch
    target = Target(
        "train_lm.py", args, module=launch.module, no_python=launch.no_python
    )
    return make_plan(
        LaunchRequest(resolved.config, target, handoff.pack_settings(resolved.entries)),
        Host(),
    )


def plan(*flags: str) -> LaunchPlan:
    """The plan of a command line."""
    return plan_of(resolve(flags=make_parser().parse_args([*BASE, *flags]).settings))


def objects(launch_plan: LaunchPlan) -> list[dict[str, Any]]:
    """The objects in the manifest."""
    return list(yaml.safe_load_all(launch_plan.files[0].text))


def pod_of(launch_plan: LaunchPlan) -> dict[str, Any]:
    """The pod of a JobSet."""
    (jobset,) = objects(launch_plan)
    pod: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]
    return pod


def test_files_variables_and_flags_agree(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "schema: 1\ncpu: true\nlaunch:\n  submit: kubernetes\n  num_machines: 2\n"
        "  kubernetes: {image: 'registry.example/train:1', volume: runs, labels: {team: vision}}\n"
    )
    flags = [
        "--cpu",
        "--num_machines=2",
        "--kubernetes_volume=runs",
        "--kubernetes_labels=team=vision",
    ]
    variables = {
        "HASTEN_CPU": "1",
        "HASTEN_SUBMIT": "kubernetes",
        "HASTEN_NUM_MACHINES": "2",
        "HASTEN_KUBERNETES_IMAGE": "registry.example/train:1",
        "HASTEN_KUBERNETES_VOLUME": "runs",
        "HASTEN_KUBERNETES_LABELS": "team=vision",
    }
    plans = [
        plan(*flags),
        plan_of(resolve(env=variables)),
        plan_of(resolve(file=read(file).entries)),
    ]
    assert plans[0].files == plans[1].files == plans[2].files
    assert objects(plans[0])[0]["metadata"]["labels"]["team"] == "vision"


def test_settings_travel_to_the_pods_as_flags_whatever_their_source_was() -> None:
    resolved = resolve(
        flags=make_parser()
        .parse_args([*BASE, "--cpu", "--gradient_accumulation_steps=4"])
        .settings,
        env={"HASTEN_MIXED_PRECISION": "bf16"},
        code={
            "launch.stop_grace_s": 20.0,
            "tracking.log_with": ("json", "tensorboard"),
        },
    )
    (container,) = pod_of(plan_of(resolved, "--lr", "3"))["containers"]
    command = container["command"]
    script = command.index("train_lm.py")
    pod_config = resolve(
        flags=make_parser().parse_args(command[4:script]).settings
    ).config
    assert command[:4] == ["python", "-m", "hasten", "launch"]
    assert command[script:] == ["train_lm.py", "--lr", "3"]
    assert (
        pod_config.cpu,
        pod_config.mixed_precision,
        pod_config.launch.stop_grace_s,
    ) == (
        True,
        "bf16",
        20.0,
    )
    assert pod_config.gradient_accumulation.num_steps == 4
    assert pod_config.tracking.log_with == ("json", "tensorboard")
    assert pod_config.launch.submit is None


def test_a_pod_has_time_to_save_shared_memory_and_its_volume() -> None:
    pod = pod_of(
        plan(
            "--cpu",
            "--stop_grace_s=300",
            "--kubernetes_volume=runs",
        )
    )
    assert pod["terminationGracePeriodSeconds"] == 330
    assert pod["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    mounts = {
        mount["name"]: mount["mountPath"]
        for mount in pod["containers"][0]["volumeMounts"]
    }
    assert mounts == {"shared-memory": "/dev/shm", "checkpoints": "/checkpoints"}


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_preempted_pods_are_replaced_and_failures_restart_the_job(
    kind: str,
) -> None:
    def policies(*flags: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        spec = objects(plan("--cpu", f"--kind={kind}", *flags))[0]["spec"]
        jobset = spec["template"]["spec"] if kind == "trainjob" else spec
        job = jobset["replicatedJobs"][0]["template"]["spec"]
        assert job["backoffLimit"] == 0
        # required by podFailurePolicy
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        rules: list[dict[str, Any]] = job["podFailurePolicy"]["rules"]
        return jobset["failurePolicy"], rules

    policy, rules = policies()
    assert policy == {"maxRestarts": 3}
    assert [
        (rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules
    ] == [
        ("Ignore", [85]),
        ("Ignore", None),
    ]
    policy, _ = policies("--kubernetes_max_restarts=0")
    assert policy == {"maxRestarts": 0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--cpu", "--kubernetes_name=Train"],
            r"name='Train' is not a DNS label.*Correct --kubernetes_name",
        ),
        (
            ["--cpu", "--kubernetes_env=PET_NNODES=1"],
            r"PET_NNODES is set by the manifest",
        ),
        (
            ["--cpu", "--kubernetes_env=WANDB_API_KEY=hunter2"],
            r"looks like a credential.*--kubernetes_env_from",
        ),
        (
            ["--cpu", "--project_dir=s3://id:hunter2@bucket/x"],
            r"project_dir .*looks like a credential",
        ),
        (["--cpu", "--nnodes=2:4"], r"a jobset has a fixed one.*Give --num_machines"),
        (
            ["--cpu", "--num_machines=2", "--num_processes=3"],
            r"cannot be split evenly over 2 pods",
        ),
        (["--cpu", "--kubernetes_gpus=2"], r"cpu and kubernetes\.gpus=2 contradict"),
        ([], r"neither GPUs nor a number of processes.*--kubernetes_gpus"),
        (
            ["--num_processes=4", "--kubernetes_gpus=2"],
            r"4 processes in a pod with kubernetes\.gpus=2",
        ),
        (
            ["--cpu", "--main_process_ip=10.0.0.1"],
            r"main_process_ip.*first pod\. Remove main_process_ip",
        ),
        (
            ["--cpu", "--submit_options=time=1"],
            r"submit_options.*options of a batch script",
        ),
        (
            ["--cpu", '--kubernetes_pod_spec={"volumes": []}'],
            r"pod_spec: volumes is written.*--kubernetes_volume",
        ),
        (
            ["--cpu", '--kubernetes_pod_spec=tolerations=[{"operator":"Exists"}]'],
            r"""tolerations is the text .*one JSON object: --kubernetes_pod_spec '\{"tolerations": """,
        ),
        (
            ["--cpu", '--kubernetes_pod_spec={"x": {"password": "hunter2"}}'],
            r"pod_spec holds what looks like",
        ),
        (["--cpu", "--ray"], r"ask for kubernetes and ray"),
        (["--cpu", "--launcher=mpi"], r"ask for kubernetes and mpi"),
    ],
)
def test_wrong_settings_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        plan(*flags)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, "image was not given"),
        (
            "robot:hunter2@registry.example/train:1",
            r"image='\*\*\*@registry.example/train:1' holds a credential.*imagePullSecrets",
        ),
        ("https://robot:hunter2@registry.example/train", r"holds a credential"),
    ],
)
def test_a_job_needs_an_image(image: str | None, message: str) -> None:
    code = {
        "cpu": True,
        "launch.submit": "kubernetes",
        "launch.kubernetes.image": image,
    }
    with pytest.raises(ConfigError, match=message) as refused:
        plan_of(resolve(code=code))
    assert "hunter2" not in str(refused.value)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text after the expansion of Kubernetes: `$$` is a dollar, `$(NAME)` the variable's value if there is one."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((\w+)\)", value, text)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_arguments_and_variables_arrive_as_they_were_given(kind: str) -> None:
    words = ("cost$$5", "$(HASTEN_TOKEN)", "$HOME", "$", "$$(A)$$")
    flags = [
        *BASE,
        "--cpu",
        f"--kind={kind}",
        "--num_machines=2",
        "--kubernetes_env=PRICE=$(HASTEN_TOKEN)$$5",
    ]
    text = (
        plan_of(resolve(flags=make_parser().parse_args(flags).settings), *words)
        .files[0]
        .text
    )
    (command,) = {
        json.dumps(mapping["command"])
        for mapping in mappings(yaml.safe_load_all(text))
        if "command" in mapping
    }
    arrived = [
        expanded(word, {"HASTEN_TOKEN": "hunter2", "A": "hunter2"})
        for word in json.loads(command)
    ]
    assert tuple(arrived[-len(words) :]) == words
    (price,) = {
        mapping["value"]
        for mapping in mappings(yaml.safe_load_all(text))
        if mapping.get("name") == "PRICE"
    }
    assert expanded(price, {"HASTEN_TOKEN": "hunter2"}) == "$(HASTEN_TOKEN)$$5"


def mappings(node: object) -> Iterator[dict[str, Any]]:
    """Every mapping below an object."""
    if isinstance(node, dict):
        yield node
        node = node.values()
    for item in (
        node if isinstance(node, Iterable) and not isinstance(node, str) else ()
    ):
        yield from mappings(item)


def test_fields_of_the_pod_annotations_and_resources_are_written() -> None:
    spec = {
        "priorityClassName": "batch",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"a": {}},
    }
    resolved = resolve(
        flags=make_parser().parse_args([*BASE, "--kubernetes_gpus=1"]).settings,
        code={
            "launch.kubernetes.pod_spec": spec,
            "launch.kubernetes.annotations": {"team/budget": 3},
            "launch.kubernetes.resources": {"rdma/hca": 1, "memory": "64Gi"},
        },
    )
    planned = plan_of(resolved)
    pod = pod_of(planned)
    assert {name: pod[name] for name in spec} == spec
    assert pod["containers"][0]["resources"]["limits"] == {
        "nvidia.com/gpu": "1",
        "rdma/hca": "1",
        "memory": "64Gi",
    }
    assert objects(planned)[0]["metadata"]["annotations"] == {"team/budget": "3"}
    pod_flag = '--kubernetes_pod_spec={"priorityClassName": "batch"}'
    assert pod_of(plan("--cpu", pod_flag))["priorityClassName"] == "batch"


def test_the_manifest_alone_is_printed_for_kubectl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*BASE, "--cpu", "--dry_run", "-o", "yaml", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert printed.replace("train", "train-lm") == plan("--cpu").files[0].text.replace(
        "train_lm.py", "train-lm.py"
    ).replace("/train:1", "/train-lm:1")
    for flags in (["--dry_run"], [*BASE]):
        with pytest.raises(ConfigError, match="-o yaml prints the manifest"):
            main([*flags, "--cpu", "-o", "yaml", __file__])


def test_a_credential_among_the_scripts_arguments_is_refused() -> None:
    resolved = resolve(flags=make_parser().parse_args([*BASE, "--cpu"]).settings)
    with pytest.raises(ConfigError, match="hold a credential") as refused:
        plan_of(resolved, "--api-key", "hunter2hunter2hunter2")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--apply"], r"kubernetes\.apply.*Add --submit kubernetes"),
        (["--submit=kubernetes", "--kind=cronjob"], r"jobset"),
    ],
)
def test_contradictions_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([*flags, "--cpu", "--dry_run", __file__])


def test_the_example_is_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    command = page.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[2:]]) == 0
    example = REPOSITORY / "examples" / "kubernetes" / "train-jobset.yaml"
    assert Path("train-jobset.yaml").read_text() == example.read_text()


def test_the_script_may_be_in_the_image_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*BASE, "--cpu", "-q", "/app/train.py"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["train-jobset.yaml"]


def test_without_kubectl_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = make_parser().parse_args([*BASE, "--cpu", "--apply"]).settings
    job = prepare(["train.py"], settings=settings, host=Host())
    with pytest.raises(LaunchError, match=r"kubectl was not found.*leave --apply out"):
        job.run()
    assert not [*tmp_path.iterdir()]


class ApiServer(ThreadingHTTPServer):
    """As much of an API server as `kubectl apply` asks for: one group of resources, none of which exists yet."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.created: list[dict[str, Any]] = []


class Answer(BaseHTTPRequestHandler):
    """The answers of the server."""

    server: ApiServer
    KINDS: Final = (("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets"),)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def answer(self, code: int, content: dict[str, Any]) -> None:
        """Send an object."""
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """List groups and resources; any object is missing."""
        group, version, kind, plural = self.KINDS[0]
        path, gv = self.path.partition("?")[0], f"{group}/{version}"
        versions = [{"groupVersion": gv, "version": version}]
        if path == "/api":
            self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            groups = [
                {"name": group, "versions": versions, "preferredVersion": versions[0]}
            ]
            self.answer(
                200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
            )
        elif path in (f"/apis/{gv}", "/api/v1"):
            listed = {
                "name": plural,
                "singularName": "",
                "namespaced": True,
                "kind": kind,
                "verbs": ["create", "get"],
            }
            resource_list = {
                "kind": "APIResourceList",
                "groupVersion": gv if gv in path else "v1",
            }
            self.answer(
                200, {**resource_list, "resources": [listed] if gv in path else []}
            )
        else:
            self.answer(
                404,
                {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "reason": "NotFound",
                    "code": 404,
                },
            )

    def do_POST(self) -> None:
        """Create an object."""
        created = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.created.append(created)
        self.answer(201, created)


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """A running server."""
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_apply_submits_the_manifest_through_kubectl(tmp_path: Path) -> None:
    with api_server() as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        context: dict[str, Any] = {
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [],
        }
        context |= {
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": ""}}],
            "current-context": "x",
        }
        (tmp_path / "kubeconfig").write_text(
            yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **context})
        )
        env = {
            **os.environ,
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
            "HOME": str(tmp_path),
        }
        # The server has no OpenAPI documents, which kubectl's own validation would download.
        kubectl = tmp_path / "bin" / "kubectl"
        kubectl.parent.mkdir()
        kubectl.write_text(
            f'#!/bin/sh\nexec {shutil.which("kubectl")} "$@" --validate=false\n'
        )
        kubectl.chmod(0o755)
        env["PATH"] = f"{kubectl.parent}:{env['PATH']}"
        words = [
            sys.executable,
            "-m",
            "hasten",
            "launch",
            *BASE,
            "--cpu",
            "--apply",
            "--num_machines=2",
            "train.py",
        ]
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert "jobset.jobset.x-k8s.io/train created" in done.stdout
    (created,) = server.created
    created["metadata"].pop("annotations")  # kubectl's copy of what was applied
    created["metadata"].pop("namespace")
    (written,) = yaml.safe_load_all((tmp_path / "train-jobset.yaml").read_text())
    assert created == written
