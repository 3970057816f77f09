//! Other users, for tests that root runs.

use std::thread;

use nix::libc;

/// Runs something as this user, with this group as its only supplementary one. What it connects or opens is that user's.
///
/// # Panics
/// When this process is not root, or what runs panics.
pub fn as_user<T: Send>(user: u32, group: u32, run: impl FnOnce() -> T + Send) -> T {
    let run = || {
        become_user(user, group);
        run()
    };
    thread::scope(|scope| scope.spawn(run).join().expect("no panic"))
}

/// Of this thread alone: libc's functions would change all threads.
fn become_user(user: u32, group: u32) {
    let (groups, own) = ([group], libc::c_long::from(user));
    // SAFETY: the array has one number, and lives for the call; the others have no pointers.
    let done = unsafe {
        [
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
            libc::syscall(libc::SYS_setresgid, own, own, own),
            libc::syscall(libc::SYS_setresuid, own, own, own),
        ]
    };
    assert_eq!(done, [0; 3], "only root can be another user");
}
