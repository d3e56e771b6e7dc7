"""The machines that the compile check compiles for, none of which is needed."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine, and its limits as its vendor gives them.

    **Attributes:**

    - `name`: as on the command line and in the table.
    - `platform`: `"cuda"` or `"tpu"`.
    - `packages`: modules that hold the compiler.
    - `bytes_per_second`, `flops_per_second`: of its memory, and in bfloat16.
    - `clock`: cycles a second.
    - `topology`: by libtpu's name of it, and the kind of its devices; of a GPU "".
    - `gpu`: its properties, as XLA describes GPUs, and its compute capability.
    """

    name: str
    platform: str
    packages: tuple[str, ...]
    bytes_per_second: float
    flops_per_second: float
    clock: float
    topology: str = ""
    kind: str = ""
    gpu: tuple[tuple[str, int], ...] = ()
    capability: tuple[int, int] = (0, 0)

    @property
    def limits(self) -> dict[str, int]:
        """The properties of a GPU by XLA's names."""
        return _ANY_GPU | dict(self.gpu)

    def missing(self) -> list[str]:
        """The modules that are not installed here."""
        return [name for name in self.packages if not _is_installed(name)]

    def device(self) -> Any:
        """A device to compile for."""
        return self.devices("1x1x1" if self.platform == "cuda" else self.topology)[0]

    def devices(self, topology: str) -> Sequence[Any]:
        """The devices of a machine to compile for: `"1x1x8"` has eight GPUs, `"v5e:2x4"` eight TPUs."""
        if self.platform == "tpu":
            return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        major, minor = self.capability
        fields = "".join(f"{name}: {value} " for name, value in self.limits.items())
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        config = f'gpu_device_info {{ {fields} {capability} }} platform_name: "CUDA" '
        config += f'dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.kind}"'
        return topologies.get_topology_desc(
            self.name, platform="cuda", target_config=config, topology=topology
        ).devices

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """Within it, programs are lowered for this machine."""
        device = _abstract_device(self)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
            yield


def _abstract_device(target: Target) -> Any:
    class Device(jax.sharding.AbstractDevice):
        compute_capability = ".".join(map(str, target.capability))

    cls: Any = Device if target.platform == "cuda" else jax.sharding.AbstractDevice
    kind = {"device_kind": target.kind, "num_cores": 1}
    try:
        return cls(**kind, platform="gpu" if target.platform == "cuda" else "tpu")
    except TypeError:  # JAX before it took a platform
        return cls(**kind)


_ANY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
_CUDA = "jax_plugins.xla_cuda13", "nvidia.cu13", "absl"

TARGETS = {
    target.name: target
    for target in (
        Target(
            "h100",
            "cuda",
            _CUDA,
            bytes_per_second=3.35e12,
            flops_per_second=989e12,
            clock=1.755e9,
            kind="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            gpu=(
                ("core_count", 132),
                ("fpus_per_core", 128),
                ("shared_memory_per_core", 233472),
                ("shared_memory_per_block_optin", 232448),
                ("l2_cache_size", 52428800),
                ("memory_bandwidth", 3352320000000),
                ("device_memory_size", 84942979072),
                ("clock_rate_ghz", 2),
            ),
        ),
        Target(
            "a100",
            "cuda",
            _CUDA,
            bytes_per_second=1.555e12,
            flops_per_second=312e12,
            clock=1.41e9,
            kind="NVIDIA A100-SXM4-40GB",
            capability=(8, 0),
            gpu=(
                ("core_count", 108),
                ("fpus_per_core", 64),
                ("shared_memory_per_core", 167936),
                ("shared_memory_per_block_optin", 166912),
                ("l2_cache_size", 41943040),
                ("memory_bandwidth", 1555200000000),
                ("device_memory_size", 42297786368),
                ("clock_rate_ghz", 1),
            ),
        ),
        Target(
            "b200",
            "cuda",
            _CUDA,
            bytes_per_second=8e12,
            flops_per_second=2250e12,
            clock=1.965e9,
            kind="NVIDIA B200",
            capability=(10, 0),
            gpu=(
                ("core_count", 148),
                ("fpus_per_core", 128),
                ("shared_memory_per_core", 233472),
                ("shared_memory_per_block_optin", 232448),
                ("l2_cache_size", 132644864),
                ("memory_bandwidth", 8000000000000),
                ("device_memory_size", 191510937600),
                ("clock_rate_ghz", 2),
            ),
        ),
        Target(
            "rtx5090",
            "cuda",
            _CUDA,
            bytes_per_second=1.792e12,
            flops_per_second=209.5e12,
            clock=2.407e9,
            kind="NVIDIA GeForce RTX 5090",
            capability=(12, 0),
            gpu=(
                ("threads_per_core_limit", 1536),
                ("core_count", 170),
                ("fpus_per_core", 128),
                ("shared_memory_per_core", 102400),
                ("shared_memory_per_block_optin", 101376),
                ("l2_cache_size", 100663296),
                ("memory_bandwidth", 1792000000000),
                ("device_memory_size", 33663483904),
                ("clock_rate_ghz", 2),
            ),
        ),
        Target("v5e", "tpu", ("libtpu",), 819e9, 197e12, clock=1.5e9, topology="v5e:2x2", kind="TPU v5 lite"),
        Target(
            "v6e", "tpu", ("libtpu",), 1640e9, 918e12, clock=1.75e9, topology="v6e:2x2", kind="TPU v6 lite"
        ),
    )
}
# For whole models alone.
V5P = Target("v5p", "tpu", ("libtpu",), 2765e9, 459e12, clock=1.75e9, topology="v5p:2x2x1", kind="TPU v5")
