# The MPI example gives the bits of one device on several processes, all of which have the tuning table of
# rank 0; where rank 0 cannot read its table, all end and its error is told.
set(environment ${CMAKE_COMMAND} -E env
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe)
foreach(ranks 1 2 3)
  execute_process(COMMAND ${environment} ${MPIEXEC} ${NUMPROC} ${ranks} ${PROGRAM} --emulate
                  OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
  if(NOT printed MATCHES "${ranks} ranks, tuning table ([0-9a-f]+): y is that of one device\n")
    message(FATAL_ERROR "${ranks} ranks print: ${printed}")
  endif()
  if(ranks EQUAL 1)
    set(table ${CMAKE_MATCH_1})
  elseif(NOT CMAKE_MATCH_1 STREQUAL table)
    message(FATAL_ERROR "${ranks} ranks have table ${CMAKE_MATCH_1}, one rank has ${table}")
  endif()
endforeach()
if(table STREQUAL "0000000000000000")
  message(FATAL_ERROR "rank 0 has no table")
endif()
execute_process(COMMAND ${environment} ${MPIEXEC} ${NUMPROC} 2 ${PROGRAM} --emulate --table /nothing
                RESULT_VARIABLE status ERROR_VARIABLE told OUTPUT_VARIABLE printed)
if(status EQUAL 0 OR NOT told MATCHES "mpi_linear: rank 0: [^\n]*/nothing")
  message(FATAL_ERROR "a table that is missing: status ${status}, ${told}")
endif()
