/* The only place the version is written; CMake, Python and the documents read it from here. */
#ifndef TILEWISE_VERSION_H
#define TILEWISE_VERSION_H

#define TILEWISE_VERSION_MAJOR 0
#define TILEWISE_VERSION_MINOR 1
#define TILEWISE_VERSION_PATCH 0
#define TILEWISE_VERSION_STRING "0.1.0"

/* Raised when a struct or function changes in a way that old callers would notice. */
#define TILEWISE_ABI_VERSION 1

#endif /* TILEWISE_VERSION_H */
