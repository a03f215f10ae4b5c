"""Translates preprocessed Metal to C++. The shim's headers handle most constructs, but four need new text:

1. Attributes of a kernel's arguments, such as [[buffer(0)]], move from the text to a table.
2. `threadgroup float x[32];` in a function is shared by the threads: it becomes a reference to the runtime's memory.
3. `constant bool flag [[function_constant(3)]];` gets its value when the program starts.
4. `float4(a, b)` constructs a vector: it becomes `metal::make<float4>(a, b)`.

Lines keep their numbers, so that messages name the line of the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .errors import CompileError

THREADGROUP_MEMORY = 32768  # bytes per threadgroup, on every Apple GPU
VECTOR = r"(?:float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong|bool)[234]"
ATTRIBUTE = r"\[\[(?:[^\]]|\](?!\]))*\]\]"
KERNEL = re.compile(
    rf"(?:\[\[\s*kernel\b(?:[^\]]|\](?!\]))*\]\]\s*(?:{ATTRIBUTE}\s*)*|\bkernel\s+(?:{ATTRIBUTE}\s*)*)void\s+(\w+)\s*\("
)
INSTANTIATION = re.compile(
    r'template\s*\[\[\s*host_name\(\s*((?:"[^"]*"\s*)+)\)\s*\]\]\s*(?:\[\[\s*kernel\b[^\]]*\]\]|kernel\b)?\s*([^;]*);'
)
FUNCTION_CONSTANT = re.compile(r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\s*(\d+)\s*\)\s*\]\]\s*;")
THREADGROUP_ATTRIBUTE = re.compile(r"\[\[\s*threadgroup\(\s*\d+\s*\)\s*\]\]")  # on arguments of MLX's functions
WIDE_VECTOR = re.compile(r"\b(?:device|constant|threadgroup)\s+(?:const\s+)?(?:metal::)?u?long[34]\b")  # see hooks.cpp
LINE_MARKER = re.compile(r"^#.*$", re.MULTILINE)


@dataclass(frozen=True)
class Binding:
    """One argument of a kernel."""

    kind: str
    """"device", "constant", or the name of a built-in value such as "thread_index_in_simdgroup"."""
    index: int | None
    """The buffer's index; None for a built-in value."""
    argument: str
    condition: str | None = None
    """A function constant: the argument exists only if the constant is true. None if the argument always exists."""


@dataclass(frozen=True)
class Translation:
    text: str
    kernels: dict[str, list[Binding]]
    constants: dict[int, tuple[str, str]]


def translate(text: str) -> Translation:
    kernels: dict[str, list[Binding]] = {}
    registrations: list[str] = []

    if wide := WIDE_VECTOR.search(text):
        raise CompileError(f"'{wide[0]}': vectors of 32 bytes in memory would be neither checked nor counted")
    bindings, templates, text = take_kernel_arguments(text)

    def register(name: str, function: str, expression: str) -> None:
        if name not in kernels:
            kernels[name] = bindings[function]
            registrations.append(_registration(len(registrations), name, expression, bindings[function]))

    def instantiate(match: re.Match[str]) -> str:
        name = "".join(re.findall(r'"([^"]*)"', match[1]))
        if (found := instantiated(match[2])) and found[0] in bindings:
            register(name, *found)
        return "\n" * match[0].count("\n")

    text = INSTANTIATION.sub(instantiate, text)
    for function in bindings:
        if function not in templates:
            register(function, function, function)
    text, constants = _initialise_function_constants(text)
    text = THREADGROUP_ATTRIBUTE.sub("", text)
    text = share_threadgroup_variables(text, shared_variable)
    text = construct_vectors(text)
    return Translation(f'{text}\n# 1 "registrations"\n' + "\n".join(registrations) + "\n", kernels, constants)


def instantiated(declaration: str) -> tuple[str, str] | None:
    """The instantiated function's name, without and with template arguments. None if `declaration` has no function."""
    declaration = LINE_MARKER.sub("", declaration)
    found = re.search(r"(?:decltype\s*\(|void\s+)\s*((?:\w+::)*(\w+))\s*(?=<)", declaration)
    if not found:
        return None
    arguments = declaration[found.end() : matching(declaration, found.end())]
    return found[2], found[1] + " ".join(arguments.split())


def matching(text: str, start: int) -> int:
    """The position after the bracket that closes the bracket text[start]."""
    opening = text[start]
    closing = {"(": ")", "[": "]", "<": ">", "{": "}"}[opening]
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if depth == 0:
            return position + 1
    raise ValueError(f"no {closing} for {text[start : start + 80]!r}")


def split_list(text: str) -> list[str]:
    """Splits a list at the commas outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if parts[-1].strip() else parts[:-1]


def take_kernel_arguments(text: str) -> tuple[dict[str, list[Binding]], set[str], str]:
    """Returns each kernel's bindings, the names of template kernels, and the text without the kernels' attributes."""
    bindings: dict[str, list[Binding]] = {}
    templates: set[str] = set()
    pieces, position = [], 0
    for match in KERNEL.finditer(text):
        if match.start() < position:
            continue
        end = matching(text, match.end() - 1)
        arguments = text[match.end() : end - 1]
        bindings[match[1]] = _bindings(LINE_MARKER.sub("", arguments))
        if re.search(r"template\s*<[^;{}]*>\s*$", text[max(0, match.start() - 2000) : match.start()]):
            templates.add(match[1])
        plain = re.sub(ATTRIBUTE, lambda attribute: "\n" * attribute[0].count("\n"), arguments)
        pieces += [text[position : match.start()], "\n" * match[0].count("\n"), f"void {match[1]}(", plain, ")"]
        position = end
    return bindings, templates, "".join(pieces) + text[position:]


def _bindings(arguments: str) -> list[Binding]:
    bindings: list[Binding] = []
    for argument in split_list(arguments):
        attributes = " ".join(re.findall(ATTRIBUTE, argument))
        plain = re.sub(ATTRIBUTE, "", argument)
        name = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", plain))[-1]
        if "*" in plain or "&" in plain:
            index = re.search(r"\bbuffer\(\s*(\d+)\s*\)", attributes)
            if not index:
                raise CompileError(
                    f"'{plain.strip()}': only pointers and references with a [[buffer(n)]] are known here"
                )
            condition = re.search(r"\bfunction_constant\(\s*(\w+)\s*\)", attributes)
            space = "constant" if re.search(r"\bconstant\b", plain) else "device"
            bindings.append(Binding(space, int(index[1]), name, condition[1] if condition else None))
        else:
            builtin = re.search(r"\b(\w*(?:thread|simdgroup|grid)\w*)\b", attributes)
            bindings.append(Binding(builtin[1] if builtin else "unknown", None, name))
    return bindings


def _registration(number: int, name: str, expression: str, bindings: list[Binding]) -> str:
    function = f"msl_function_{number}"
    arguments, descriptions = [], []
    for position, binding in enumerate(bindings):
        if binding.index is None:
            arguments.append(f"MSL_BUILTIN({function}, {position}, {binding.kind})")
            continue
        arguments.append(f"MSL_POINTER({function}, {position}, {binding.index})")
        is_constant = str(binding.kind == "constant").lower()
        descriptions.append(
            f"metal::binding::describe<{function}, {position}>"
            f'("{binding.argument}", {is_constant}, {binding.index}, {binding.condition or "true"})'
        )
    return (
        f"static constexpr auto* {function} = &{expression};\n"
        f"static const MslBinding msl_bindings_{number}[] = {{{', '.join([*descriptions, 'MslBinding{}'])}}};\n"
        f'static const MslKernel msl_kernel_{number} = {{"{name}", [](const MslThread* thread_) '
        f"{{ (void)thread_; {function}({', '.join(arguments)}); }}, "
        f"msl_bindings_{number}, {len(descriptions)}, {THREADGROUP_MEMORY}}};\n"
        f"static const bool msl_registered_{number} = (msl_register(&msl_kernel_{number}), true);"
    )


def _initialise_function_constants(text: str) -> tuple[str, dict[int, tuple[str, str]]]:
    constants: dict[int, tuple[str, str]] = {}

    def initialise(match: re.Match[str]) -> str:
        type_, name, index = match[1], match[2], int(match[3])
        constants.setdefault(index, (name, type_))
        # The variable must not be const, or the compiler could assume its value.
        return f"static {type_} {name} = metal::binding::function_constant<{type_}>({index});" + "\n" * match[0].count(
            "\n"
        )

    return FUNCTION_CONSTANT.sub(initialise, text), constants


def share_threadgroup_variables(text: str, declare: Callable[[str, str, str], str]) -> str:
    """Replaces the declarations of threadgroup variables by `declare(type, name, dimensions)`."""
    pieces, position = [], 0
    for match in re.finditer(r"\bthreadgroup\b", text):
        end = _declaration_end(text, match.end()) if match.start() >= position else None
        if end is None:
            continue
        first, *rest = split_list(text[match.end() : end])
        found = re.match(r"(.*?)(\w+)\s*((?:\[.*\])*)\s*$", first, re.DOTALL)
        if not found:
            continue
        declarators = [(found[2], found[3])]
        for declarator in rest:
            name, _, dimensions = declarator.strip().partition("[")
            declarators.append((name.strip(), f"[{dimensions}" if dimensions else ""))
        pieces.append(text[position : match.start()])
        pieces += [declare(" ".join(found[1].split()), *each) for each in declarators]
        pieces.append("\n" * text[match.start() : end].count("\n"))
        position = end + 1
    return "".join(pieces) + text[position:]


def _declaration_end(text: str, start: int) -> int | None:
    """The end of the variable's declaration around `start`. None for a pointer, an argument or a cast."""
    depth = angle = 0
    for position in range(start, len(text)):
        character = text[position]
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0:
            angle += (character == "<") - (character == ">")
            if (
                angle < 0
                or character in "*&{="
                or (character == ":" and ":" not in text[position - 1 : position + 2 : 2])
            ):
                return None
            if character == ";" and angle == 0:
                return position
    return None


def shared_variable(type_: str, name: str, dimensions: str) -> str:
    call = f'msl_threadgroup_variable(&msl_key_{name}, sizeof({type_}{dimensions}), "{name}")'
    return f"static char msl_key_{name}; {type_} (&{name}){dimensions} = *({type_} (*){dimensions}){call}; "


def construct_vectors(text: str) -> str:
    """Replaces `float4(…)`, `vec<T, 2>(…)` and constructors of aliases of such types by metal::make."""
    aliases = re.findall(rf"\busing\s+(\w+)\s*=\s*(?:metal::)?(?:vec\s*<[^;]*>|{VECTOR})\s*;", text)
    aliases += re.findall(rf"\btypedef\s+(?:metal::)?(?:vec\s*<[^;]*>|{VECTOR})\s+(\w+)\s*;", text)
    names = "|".join([VECTOR, *sorted(set(aliases))])
    # This matches neither a default argument's `float4()` nor the declarator of `float4 (&rows)[8]`.
    call = r"\s*\((?!\s*\)|\s*[&*]\s*\w+\s*\)\s*[\[(])"
    text = re.sub(rf"(?<![\w.>:])(?:metal::)?\b({names}){call}", r"metal::make<\1>(", text)
    text = re.sub(rf"(?<![\w.>:])(?<!operator )(?:metal::)?\b(vec<[^<>;(){{}}]*>){call}", r"metal::make<\1>(", text)
    return re.sub(rf"\bstatic_cast<\s*({names})\s*>\s*\(", r"metal::make<\1>(", text)
