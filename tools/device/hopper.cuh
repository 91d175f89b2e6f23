// The Hopper reader: sm_90a, wgmma.

#if defined(KMLA_TILE) && defined(KMLA_HOPPER)
#endif
