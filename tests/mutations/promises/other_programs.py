"""Mutations that break the promises about other programs and servers."""

from . import PATCH, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "a program's mask is ignored",
        f"{PATCH}/mx_fast.py",
        "plain_call(q, k, v, scale, mask, sinks)",
        "plain_call(q, k, v, scale, None, sinks)",
        "programs/test_multi_head_attention.py::test_a_layer",
    ),
    Mutation(
        "a short prompt beside longer ones sees its padding",
        f"{PATCH}/described_masks.py",
        "return mask & KeyRange(0 if left_padding is None else _as_it_is_now(left_padding), stop)",
        "return mask",
        "patch/test_command_server.py::test_eight_clients",
        nightly="forty requests to a server",
    ),
]
