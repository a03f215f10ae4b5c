// Prints the exception's name and the message, and ends the process. program.py parses the printed text.
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
