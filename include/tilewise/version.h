/* The only definition of the version; CMake, Python and the documentation read it from here. */
#ifndef TILEWISE_VERSION_H
#define TILEWISE_VERSION_H

#define TILEWISE_VERSION_MAJOR 0
#define TILEWISE_VERSION_MINOR 1
#define TILEWISE_VERSION_PATCH 0
#define TILEWISE_VERSION_STRING "0.1.0"

/* Incremented whenever a struct or function changes incompatibly for existing callers. */
#define TILEWISE_ABI_VERSION 1

#endif /* TILEWISE_VERSION_H */
