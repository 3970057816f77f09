//! A disk in memory as `/dev/ublkbN`, served by one thread with libublk. It says its node and runs until it is killed.
//!
//! The scenario `attach-speed` of `cargo xtask interop` runs it in a guest beside a disk in memory behind `nbd-client`: the
//! difference is what `ferroce map --attach` would gain by ublk.

use std::{cell::RefCell, process::ExitCode};

use libublk::{
    BufDesc, UblkError, UblkFlags, UblkIORes,
    ctrl::{UblkCtrl, UblkCtrlBuilder},
    io::{BufDescList, UblkDev, UblkIOCtx, UblkQueue},
    sys,
};

/// Bytes of the disk.
const SIZE: u64 = 64 << 20;
/// Requests that the kernel may have in flight.
const DEPTH: u16 = 128;
/// Bytes of the longest request.
const LONGEST: u32 = 512 << 10;
/// `EINVAL` and `EOPNOTSUPP`, as a completion has them.
const INVALID: i32 = -22;
const UNSUPPORTED: i32 = -95;

/// Does a request. The bytes that were moved, or an error number below zero.
fn serve(queue: &UblkQueue<'_>, tag: u16, memory: &mut [u8], buffer: &mut [u8]) -> i32 {
    let request = queue.get_iod(tag);
    let at = (request.start_sector << 9) as usize;
    let len = (request.nr_sectors << 9) as usize;
    let (Some(disk), Some(buffer)) = (memory.get_mut(at..at.saturating_add(len)), buffer.get_mut(..len)) else {
        return INVALID;
    };
    match request.op_flags & 0xff {
        sys::UBLK_IO_OP_READ => buffer.copy_from_slice(disk),
        sys::UBLK_IO_OP_WRITE => disk.copy_from_slice(buffer),
        sys::UBLK_IO_OP_FLUSH => return 0,
        _ => return UNSUPPORTED,
    }
    len as i32
}

/// Serves the only queue until the device goes.
fn queue(id: u16, device: &UblkDev) -> Result<(), UblkError> {
    let mut memory = vec![0; SIZE as usize];
    let buffers = RefCell::new(device.alloc_queue_io_bufs());
    let queue = {
        let buffers = buffers.borrow();
        UblkQueue::new(id, device)?.submit_fetch_commands_unified(BufDescList::Slices(Some(&buffers)))?
    };
    queue.wait_and_handle_io(|queue: &UblkQueue<'_>, tag, _: &UblkIOCtx| {
        let buffer = &mut buffers.borrow_mut()[usize::from(tag)];
        let done = serve(queue, tag, &mut memory, buffer.as_mut_slice());
        let answer = BufDesc::Slice(buffer.as_slice());
        if let Err(e) = queue.complete_io_cmd_unified(tag, answer, Ok(UblkIORes::Result(done))) {
            eprintln!("request {tag}: {e}");
        }
    });
    Ok(())
}

fn run() -> Result<(), UblkError> {
    let control = UblkCtrlBuilder::default()
        .name("memory")
        .id(-1)
        .nr_queues(1)
        .depth(DEPTH)
        .io_buf_bytes(LONGEST)
        .dev_flags(UblkFlags::UBLK_DEV_F_ADD_DEV)
        .build()?;
    let set_size = |device: &mut UblkDev| {
        device.set_default_params(SIZE);
        Ok(())
    };
    let serve = |id, device: &UblkDev| {
        if let Err(e) = queue(id, device) {
            eprintln!("queue {id}: {e}");
        }
    };
    control.run_target(set_size, serve, |control: &UblkCtrl| {
        println!("{}", control.get_bdev_path())
    })?;
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
