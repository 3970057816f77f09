/*
 * ferroce as a library: libibverbs and librdmacm over RoCEv2 in userspace, without RDMA hardware, kernel modules or
 * privilege.
 *
 * libferroce_verbs.so has the binary interface of libibverbs (rdma-core 44) and, together with the system's librdmacm, that
 * of librdmacm. So programs are written and compiled against rdma-core's headers, and either run under `ferroce run`, or
 * find it in the place of libibverbs.so.1 (LD_LIBRARY_PATH=…/lib/ferroce), or are linked with it before libibverbs:
 *
 *     cc program.c $(pkg-config --cflags --libs ferroce-verbs)
 *
 * Environment:
 *   FERROCE_ADDR        addresses to use, separated by commas; default: all of this host
 *   FERROCE_MTU         largest path MTU: 256, 512, 1024, 2048 or 4096
 *   FERROCE_PCAP        capture file; %p in it becomes the process id
 *   FERROCE_BROKER      the program `ferroce`, which processes that share an address start as their broker;
 *                       `off`: have the address alone
 *   FERROCE_BROKER_DIR  where the broker's socket is
 */
#ifndef FERROCE_VERBS_H
#define FERROCE_VERBS_H

#include <infiniband/verbs.h>

/* The version of rdma-core whose interface this is. */
#define FERROCE_VERBS_RDMA_CORE 44

#endif
