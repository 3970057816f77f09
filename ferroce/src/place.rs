//! Surroundings of a server, a mapping, an RDS node or an LNet node: in the foreground, or as a task of the daemon.

use std::sync::Arc;

use rds_node::NodeControl;
use rnbd_disk::Exports;
use rnbd_host::{control::map::MapControl, tls::Tls};

use crate::{
    control::{Control, ControlArgs, ServiceRegistry},
    names::Resolver,
    output::Failure,
    printer::Printer,
    report::{ReportArgs, Reporter},
    signals::Stop,
};

/// Stage of the start.
pub(crate) enum Stage {
    /// A mapping opens its session. Its NBD clients have this TLS.
    Mapping(MapControl, Option<Tls>),
    /// A server serves these.
    Serving(Arc<Exports>),
    /// An RDS node runs.
    Node(NodeControl),
    /// Its users have what they want.
    Up,
}

/// Resources of the surroundings.
pub(crate) struct Place<'a> {
    /// Of the sockets that the process was started with it gets those of this name; in the foreground all.
    pub(crate) sockets: Option<String>,
    /// When it is to end.
    pub(crate) stop: Stop,
    pub(crate) services: Arc<ServiceRegistry>,
    /// Keeps the addresses of the names in its options.
    pub(crate) resolver: Arc<Resolver>,
    pub(crate) reporter: Reporter,
    /// Is told how far it is.
    pub(crate) tell: &'a dyn Fn(Stage),
}

/// Runs something in the foreground, to its end or a signal.
pub(crate) fn foreground(
    control: &ControlArgs,
    report: &ReportArgs,
    run: impl FnOnce(Place<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    // It ends after what it is asked about, which answers.
    let control = Control::start(control)?;
    let services = control.services();
    let outcome = run(Place {
        sockets: None,
        stop,
        services: services.clone(),
        resolver: Arc::default(),
        reporter: report.reporter(control.events()),
        tell: &|stage| match stage {
            Stage::Mapping(_, Some(tls)) => services.renewable(tls),
            Stage::Mapping(..) | Stage::Serving(_) | Stage::Node(_) | Stage::Up => {}
        },
    });
    // The end of `control` waits for answers, which wait for room.
    let finished = Printer::stdout().finish();
    outcome.and(finished)
}
