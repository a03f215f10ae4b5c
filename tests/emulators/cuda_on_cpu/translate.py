"""Translates the source of a CUDA kernel to C++. The shim's headers handle most constructs, but three need new text:

1. `asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(b))` becomes a call, `ptx::cvt_rn_f16_f32(a, b)`.
2. Variables in shared memory become references to the runtime's memory.
3. Appended code registers the kernel, with its arrays as buffers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.emulators.metal_on_cpu.translate import (
    Binding,
    Translation,
    matching,
    share_threadgroup_variables,
    shared_variable,
    split_list,
)

DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?uchar (\w+)\[\];")
SHARED_MEMORY = 227 * 1024  # bytes per block, on compute capability 9.0


def translate(text: str, launch: Mapping[str, Any]) -> Translation:
    text = DYNAMIC.sub(r"uchar* \1 = static_cast<uchar*>(cuda_dynamic_memory());", text)
    text = re.sub(r"\b__shared__\b", "threadgroup", text)
    text = share_threadgroup_variables(_call_instructions(text), shared_variable)
    bindings = bindings_of(launch)
    dynamic = f"""static char dynamic_key;
        extern "C" void* cuda_dynamic_memory() {{
          return msl_threadgroup_variable(&dynamic_key, {launch["dynamic_shared"]}, "shared");
        }}"""
    declared = '\nextern "C" void* cuda_dynamic_memory();\n'
    registration = f'\n# 1 "registrations"\n{dynamic}\n{_registration(launch, bindings)}'
    return Translation(declared + text + registration, {launch["function"]: bindings}, {})


def bindings_of(launch: Mapping[str, Any]) -> list[Binding]:
    """The bindings of the launch's buffers (arrays and structs), in their order."""
    return [
        Binding("constant" if isinstance(content, bytes) else "device", index, name)
        for index, (name, content) in enumerate(launch["buffers"].items())
    ]


def _registration(launch: Mapping[str, Any], bindings: list[Binding]) -> str:
    described, assigned = [], []
    for binding in bindings:
        content = launch["buffers"][binding.argument]
        constant = str(binding.kind == "constant").lower()
        is_input = str(not isinstance(content, int)).lower()
        described.append(f'{{"{binding.argument}", {constant}, {binding.index}, {is_input}, false, true, 1}}')
        pointer = f"thread->buffers[{binding.index}]"
        if binding.argument == "tensor_maps":
            for place, name in enumerate(launch["tensor_maps"]):
                array = f"arguments.arrays[{launch['numbers'][name]}]"
                assigned.append(f"(&arguments.key_map)[{place}] = cuda_map({array}, {pointer}, {place});")
        elif constant == "true":
            member = f"arguments.{binding.argument}"
            assigned.append(f"{member} = *static_cast<decltype({member})*>({pointer});")
        else:
            assigned.append(f"arguments.arrays[{launch['numbers'][binding.argument]}] = {pointer};")
    return f"""
        static flashattn::cuda::TensorMap cuda_map(void* array, const void* tensor_maps, int place) {{
          struct MappedArray {{ int array, rows; long sizes[4], steps[3]; }};  // as gpu::MappedArray
          const auto& [binding, rows, sizes, steps] = static_cast<const MappedArray*>(tensor_maps)[place];
          for (long size : sizes) if (size == 0) cuda_fail("a box of an array without elements");
          const CudaMap map = {{static_cast<char*>(array), {{sizes[0], sizes[1], sizes[2], sizes[3]}},
                               {{2, 2 * steps[0], 2 * steps[1], 2 * steps[2]}}, rows}};
          flashattn::cuda::TensorMap result;
          __builtin_memcpy(&result, &map, sizeof map);
          return result;
        }}
        static const MslBinding bindings[] = {{{", ".join(described)}}};
        static void run(const MslThread* thread) {{
          static flashattn::cuda::{"Backward" if "backward" in launch["buffers"] else "Box"}Arguments arguments;
          {" ".join(assigned)}
          {launch["function"]}(arguments);
        }}
        static const MslKernel kernel = {{"{launch["function"]}", run, bindings, {len(bindings)}, {SHARED_MEMORY}}};
        static const bool registered = (msl_register(&kernel), true);
    """


def _call_instructions(text: str) -> str:
    pieces, position = [], 0
    for match in re.finditer(r"\basm\s*(?:volatile\s*)?(?=\()", text):
        end = matching(text, match.end())
        pieces += [text[position : match.start()], _call(text[match.end() + 1 : end - 1])]
        pieces.append("\n" * text[match.start() : end].count("\n"))
        position = end
    return "".join(pieces) + text[position:]


def _call(statement: str) -> str:
    """Returns the call that replaces an asm statement. It calls the statement's instruction with the longest name."""
    template, operands = _split(statement)
    instructions = "".join(re.findall(r'"([^"]*)"', template))
    names = re.findall(r"[a-z]\w*(?:(?:\.|::)\w+)+", instructions)
    if not names:
        return "static_cast<void>(0)"
    name = max(names, key=len)
    expressions = [
        operand[operand.index("(") : matching(operand, operand.index("("))]
        for part in operands
        for operand in split_list(part)
        if "(" in operand
    ]
    predicates = dict(re.findall(r"setp\.ne\.b32 (\w+), %(\d+), 0;", instructions))
    _, _, behind = instructions.partition(name)
    arguments = []
    for word in re.findall(r"%?\b\w+", behind.partition(";")[0]):
        number = predicates.get(word, word.removeprefix("%"))
        if word in predicates or word.startswith("%"):
            arguments.append(expressions[int(number)])
        elif number.isdecimal():
            arguments.append(number)
    return f"ptx::{re.sub(r'[^a-z0-9]', '_', name.lower())}({', '.join(arguments)})"


def _split(statement: str) -> tuple[str, list[str]]:
    """The template of an asm statement, and its lists of operands. Each list begins at a colon."""
    strings = re.match(r'(?:\s*"[^"]*"|\s*#[^\n]*\n)*', statement)
    assert strings is not None
    rest = statement[strings.end() :]
    parts, depth, in_string = [""], 0, False
    for character in rest:
        in_string ^= character == '"'
        depth += 0 if in_string else (character in "([{") - (character in ")]}")
        if character == ":" and depth == 0 and not in_string:
            parts.append("")
        else:
            parts[-1] += character
    return strings[0], parts
