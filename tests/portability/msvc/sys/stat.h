// sys/stat.h - what the header asks of Microsoft's, for a compile that links nothing.
#pragma once
#define _S_IFMT 0xF000
#define _S_IFDIR 0x4000
#define _S_IFREG 0x8000
#define _S_IREAD 0x0100
#define _S_IWRITE 0x0080
#ifdef __cplusplus
extern "C" {
#endif
struct stat {
    unsigned int st_dev;
    unsigned short st_ino;
    unsigned short st_mode;
    short st_nlink;
    short st_uid;
    short st_gid;
    unsigned int st_rdev;
    long st_size; // 32 bits
    long long st_atime;
    long long st_mtime;
    long long st_ctime;
};
int __cdecl stat(const char* path, struct stat* about);
int __cdecl fstat(int file, struct stat* about);
#ifdef __cplusplus
}
#endif
