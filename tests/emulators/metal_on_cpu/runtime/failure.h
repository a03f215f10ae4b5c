// Ends the emulator's process after an error. The Python process that started it raises `exception` with the message.
#pragma once

// The format of a program counter in messages. Python replaces the printed <pc 0x…> by the file and the line.
#define PC_FORMAT "<pc %#lx>"

[[noreturn]] void fail(const char* exception, const char* format, ...) __attribute__((format(printf, 2, 3)));
