// Ends a run that went wrong, with the name of a Python exception and a message.
#pragma once

// Program counters in messages, as <pc 0x…>: Python replaces them by file and line.
#define PC_FORMAT "<pc %#lx>"

[[noreturn]] void fail(const char* exception, const char* format, ...) __attribute__((format(printf, 2, 3)));
