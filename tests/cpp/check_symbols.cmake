# Checks the symbols of the binaries with nm.
#
#   LIBRARY, HEADERS    the shared library has exactly the functions that the headers of this folder
#                       declare
#   OBJECTS (a|b|...)   an object of one instruction set defines its table and nothing else: a weak
#                       symbol (an inline function that was not inlined) could be taken by the
#                       linker for the whole library, and a machine without the instruction set
#                       would run it
function(global_symbols result)
  execute_process(
    COMMAND "${NM}" --defined-only --extern-only --format=posix ${ARGN}
    OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" lines "${output}")
  set(symbols "")
  foreach(line IN LISTS lines)
    if(line MATCHES "^([^ ]+) ([A-Za-z]) " AND NOT CMAKE_MATCH_2 STREQUAL "A")
      string(REGEX REPLACE "@.*" "" symbol "${CMAKE_MATCH_1}")
      list(APPEND symbols "${symbol}")
    endif()
  endforeach()
  list(SORT symbols)
  set(${result} "${symbols}" PARENT_SCOPE)
endfunction()

file(GLOB headers "${HEADERS}/*.h")
set(declarations "")
foreach(header IN LISTS headers)
  file(READ "${header}" text)
  string(REGEX MATCHALL "TILEWISE_API[^(;]*\\(" found "${text}")
  list(APPEND declarations ${found})
endforeach()
set(declared "")
foreach(declaration IN LISTS declarations)
  string(REGEX MATCH "(tilewise_[a-z_]+)\\($" matched "${declaration}")
  list(APPEND declared "${CMAKE_MATCH_1}")
endforeach()
list(SORT declared)
global_symbols(exported -D "${LIBRARY}")
if(NOT declared OR NOT exported STREQUAL declared)
  message(SEND_ERROR "exported: ${exported}\ndeclared: ${declared}")
endif()

string(REPLACE "|" ";" objects "${OBJECTS}")
list(LENGTH objects count)
if(count EQUAL 0)
  message(SEND_ERROR "no object of an instruction set was given")
endif()
foreach(object IN LISTS objects)
  string(REGEX REPLACE ".*/cpu/isa/([^/]*)/([^/.]*)\\..*" "\\1_\\2" name "${object}")
  global_symbols(symbols "${object}")
  list(LENGTH symbols length)
  if(NOT length EQUAL 1 OR NOT symbols MATCHES "[0-9]${name}")
    message(SEND_ERROR "${object} defines ${symbols}: only ${name} is allowed")
  endif()
endforeach()
list(LENGTH exported length)
message(STATUS "${length} functions exported, ${count} objects of instruction sets checked")
