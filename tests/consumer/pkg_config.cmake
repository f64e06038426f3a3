# Compiles and runs a C program with only the flags that pkg-config gives.
set(ENV{PKG_CONFIG_PATH} "${LIBDIR}/pkgconfig")
execute_process(
  COMMAND "${PKG_CONFIG}" --cflags --libs tilewise
  OUTPUT_VARIABLE flags
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND "${CC}" -std=c11 "${SOURCE}" -o "${PROGRAM}" ${flags} -lm
                        "-Wl,-rpath,${LIBDIR}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
