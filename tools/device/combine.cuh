// Combine over the ranks of decode context parallelism: each part is a rank's shard.

#ifndef KMLA_TILE // support kernels

KMLA_KERNEL(kmla_combine, kmla_i_combine_args, KMLA_I_SUPPORT_THREADS, 6) {
    if (args.share > 0) {
        weighted_sum<false, true>(args);
    } else {
        weighted_sum<false, false>(args);
    }
}

#endif
