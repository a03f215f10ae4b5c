// Ends the process after an error. Python then raises the exception of this name, with this message.
#pragma once

// How messages print a program counter: as <pc 0x…>, which Python replaces by the file and the line.
#define PC_FORMAT "<pc %#lx>"

[[noreturn]] void fail(const char* exception, const char* format, ...) __attribute__((format(printf, 2, 3)));
