// Prints the exception's name and the message, which program.py parses, and ends the process.
#include "failure.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

void fail(const char* exception, const char* format, ...) {
  fprintf(stderr, "%s\n", exception);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fflush(stderr);
  _Exit(3);
}
