//! Error numbers, against the C library's.

use std::io;

use rnbd::Errno;

/// Numbers are written down in `errno.rs`, which uses no C library.
#[test]
fn numbers_are_the_systems() {
    let named = [
        (Errno::EPERM, libc::EPERM),
        (Errno::ENOENT, libc::ENOENT),
        (Errno::EINTR, libc::EINTR),
        (Errno::EIO, libc::EIO),
        (Errno::ENXIO, libc::ENXIO),
        (Errno::EAGAIN, libc::EAGAIN),
        (Errno::ENOMEM, libc::ENOMEM),
        (Errno::EACCES, libc::EACCES),
        (Errno::ENOTBLK, libc::ENOTBLK),
        (Errno::EBUSY, libc::EBUSY),
        (Errno::EEXIST, libc::EEXIST),
        (Errno::EXDEV, libc::EXDEV),
        (Errno::ENODEV, libc::ENODEV),
        (Errno::ENOTDIR, libc::ENOTDIR),
        (Errno::EISDIR, libc::EISDIR),
        (Errno::EINVAL, libc::EINVAL),
        (Errno::ENFILE, libc::ENFILE),
        (Errno::EMFILE, libc::EMFILE),
        (Errno::EFBIG, libc::EFBIG),
        (Errno::ENOSPC, libc::ENOSPC),
        (Errno::EROFS, libc::EROFS),
        (Errno::ENAMETOOLONG, libc::ENAMETOOLONG),
        (Errno::ENOSYS, libc::ENOSYS),
        (Errno::ELOOP, libc::ELOOP),
        (Errno::EMSGSIZE, libc::EMSGSIZE),
        (Errno::EOPNOTSUPP, libc::EOPNOTSUPP),
        (Errno::ECONNABORTED, libc::ECONNABORTED),
        (Errno::ENOTCONN, libc::ENOTCONN),
        (Errno::ESHUTDOWN, libc::ESHUTDOWN),
        (Errno::ETIMEDOUT, libc::ETIMEDOUT),
        (Errno::EDQUOT, libc::EDQUOT),
    ];
    for (errno, number) in named {
        assert_eq!(errno.raw(), number);
    }
}

#[test]
fn errors_of_the_system_keep_their_number_and_others_become_eio() {
    assert_eq!(Errno::from(io::Error::from_raw_os_error(libc::ENOSPC)), Errno::ENOSPC);
    assert_eq!(Errno::from(io::Error::other("something")), Errno::EIO);
}
