# The package for find_package(tilewise) and pkg-config. In a wheel (SKBUILD) the same tree is part
# of the Python package: tilewise/lib, tilewise/include.
include(CMakePackageConfigHelpers)
if(DEFINED SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/tilewise")

install(
  TARGETS tilewise
  EXPORT tilewise-targets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
foreach(adapter IN ITEMS tilewise_torch tilewise_jax)
  if(TARGET ${adapter})
    install(TARGETS ${adapter} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
endforeach()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/tilewise"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

install(EXPORT tilewise-targets NAMESPACE tilewise:: DESTINATION "${config_dir}")
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/tilewise-config.cmake.in"
  "${PROJECT_BINARY_DIR}/tilewise-config.cmake" INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tilewise-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/tilewise-config.cmake"
              "${PROJECT_BINARY_DIR}/tilewise-config-version.cmake" DESTINATION "${config_dir}")
# The build tree can also be used as a package: -Dtilewise_DIR=<build folder>.
export(EXPORT tilewise-targets NAMESPACE tilewise:: FILE
       "${PROJECT_BINARY_DIR}/tilewise-targets.cmake")

# The prefix in the .pc file is relative to the file, so that the tree can be moved.
file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file("${PROJECT_SOURCE_DIR}/cmake/tilewise.pc.in" "${PROJECT_BINARY_DIR}/tilewise.pc"
               @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/tilewise.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
