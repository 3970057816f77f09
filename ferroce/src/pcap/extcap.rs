//! `ferroce pcap extcap`: interfaces for Wireshark that capture RoCEv2 with the judge's comments.
//!
//! The protocol is in <https://www.wireshark.org/docs/man-pages/extcap.html>: one call lists interfaces, others link types and options, and
//! the last writes a capture to a pipe.

use std::{
    fs::File,
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use roce_pcap::{Frame, Interface, PcapNgWriter, comments};

use super::live::{NetInterface, PacketSocket};
use crate::output::Failure;

/// Before the names of interfaces: Wireshark's own have the same.
const PREFIX: &str = "ferroce-";

/// Capture RoCEv2 traffic for Wireshark, with the judge's findings as comments on the frames
///
/// Speaks the protocol of Wireshark's extcap programs. The script `extcap/ferroce` calls it. Capturing needs CAP_NET_RAW.
#[derive(Args)]
#[command(hide = true)]
pub(super) struct ExtcapArgs {
    /// List interfaces
    #[arg(long)]
    extcap_interfaces: bool,
    /// List link types of an interface
    #[arg(long)]
    extcap_dlts: bool,
    /// List options of an interface
    #[arg(long)]
    extcap_config: bool,
    /// Capture
    #[arg(long, requires = "fifo")]
    capture: bool,
    /// Interface
    #[arg(long, value_name = "NAME")]
    extcap_interface: Option<String>,
    /// Pipe to write the capture to
    #[arg(long, value_name = "FILE")]
    fifo: Option<PathBuf>,
    /// Version of Wireshark
    #[arg(long, value_name = "VERSION")]
    extcap_version: Option<String>,
    /// Filter of a capture; none is taken
    #[arg(long, value_name = "FILTER")]
    extcap_capture_filter: Option<String>,
    /// Capture without the judge
    #[arg(long)]
    no_judge: bool,
}

/// Runs the command.
pub(super) fn run(args: &ExtcapArgs) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    if args.extcap_interfaces {
        return interfaces(&mut out);
    }
    let filter = args.extcap_capture_filter.as_deref().unwrap_or_default();
    let Some(name) = &args.extcap_interface else {
        let text =
            "expected --extcap-interfaces, or --extcap-interface with --extcap-dlts, --extcap-config or --capture";
        return Err(Failure::usage(text));
    };
    let interface = find(name)?;
    if args.extcap_dlts {
        let (number, name) = (interface.link, if interface.link == 1 { "EN10MB" } else { "RAW" });
        writeln!(out, "dlt {{number={number}}}{{name={name}}}{{display={name}}}")?;
    } else if args.extcap_config {
        writeln!(
            out,
            "arg {{number=0}}{{call=--no-judge}}{{display=Without the judge}}\
             {{tooltip=Capture frames without comments on the rules that they break}}{{type=boolflag}}{{default=false}}"
        )?;
    } else if !filter.is_empty() {
        // Wireshark takes what is printed for what is wrong with the filter.
        writeln!(out, "the filter is always: udp dst port 4791")?;
        if args.capture {
            return Err(Failure::usage(
                "capture filters are not taken: it is always udp dst port 4791",
            ));
        }
    } else if let (true, Some(fifo)) = (args.capture, &args.fifo) {
        return capture(&interface, fifo, !args.no_judge);
    }
    Ok(())
}

fn interfaces(out: &mut impl Write) -> Result<(), Failure> {
    let (version, home) = (env!("CARGO_PKG_VERSION"), env!("CARGO_PKG_REPOSITORY"));
    writeln!(out, "extcap {{version={version}}}{{help={home}}}")?;
    for NetInterface { name, .. } in NetInterface::all().map_err(Failure::of)? {
        writeln!(
            out,
            "interface {{value={PREFIX}{name}}}{{display=RoCEv2 on {name}, judged by ferroce}}"
        )?;
    }
    Ok(())
}

fn find(name: &str) -> Result<NetInterface, Failure> {
    let plain = name.strip_prefix(PREFIX).unwrap_or(name);
    let all = NetInterface::all().map_err(Failure::of)?;
    let found = all.into_iter().find(|interface| interface.name == plain);
    found.ok_or_else(|| Failure::failed(format!("{plain}: no interface that is up, with Ethernet or IP frames")))
}

/// Captures until the pipe is closed.
fn capture(interface: &NetInterface, fifo: &Path, judged: bool) -> Result<(), Failure> {
    let mut socket = PacketSocket::open(interface).map_err(|e| {
        let hint = match e.kind() {
            ErrorKind::PermissionDenied => ": capturing needs CAP_NET_RAW (setcap cap_net_raw+ep on ferroce, or root)",
            _ => "",
        };
        Failure::failed(format!("{}: {e}{hint}", interface.name))
    })?;
    // Waits for the reader. Each block is one write, so that frames are shown as they come.
    let file = File::options().write(true).open(fifo);
    let file = file.map_err(|e| Failure::failed(format!("{}: {e}", fifo.display())))?;
    match stream(interface, &mut socket, file, judged) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Failure::failed(format!("{}: {e}", interface.name))),
    }
}

fn stream(interface: &NetInterface, socket: &mut PacketSocket, pipe: File, judged: bool) -> io::Result<()> {
    let mut out = PcapNgWriter::new(pipe.try_clone()?)?;
    // Described at once: Wireshark shows that the capture runs.
    let number = out.interface(interface.link, 0, Some(&interface.name))?;
    let described = Interface::live(interface.link, &*interface.name);
    let mut checker = ferroce_dissect::checker(&*interface.name);
    checker.keep_findings();
    let mut index = 0;
    while socket.wait(&pipe)? {
        let Some(received) = socket.receive()? else { continue };
        index += 1;
        let mut texts = vec![];
        if judged {
            let frame = Frame::live(
                index,
                received.time_ns,
                &described,
                received.data,
                received.original_len,
                received.direction,
            );
            checker.frame(&frame, |_, _| {});
            texts = comments(index, &checker.take_findings());
        }
        let record = roce_pcap::Record {
            interface: number,
            time_ns: received.time_ns,
            original_len: received.original_len,
            data: received.data,
            direction: received.direction,
        };
        out.write(&record, texts.iter().map(String::as_str))?;
    }
    Ok(())
}
