//! Completions and events on tokio.

use std::{net::SocketAddr, thread, time::Duration};

use roce::{
    AccessFlags, CmEventKind, ConnParams, Device, DeviceConfig, Payload, QpCaps, QpInit, RecvWr, SendFlags, SendOp,
    SendWr, VerbsError, WcStatus,
    aio::{AsyncCq, AsyncEventChannel, AsyncEvents},
};

#[path = "../../examples/async_echo.rs"]
mod async_echo;

/// Longest time that anything takes.
const TIMEOUT: Duration = Duration::from_secs(60);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

fn open() -> Device {
    Device::open(DeviceConfig::new(ferroce_loopback::address().into())).unwrap()
}

/// Has it end in time.
async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("it comes in time")
}

#[test]
fn a_server_with_tasks_echoes() {
    let server = ferroce_loopback::address().into();
    thread::scope(|scope| {
        scope.spawn(|| runtime().block_on(in_time(async_echo::run(server, Some(1)))).unwrap());
        let answer = (0..100).find_map(|_| {
            let answer = crate::rc_client::run(ferroce_loopback::address().into(), server, b"hello");
            // It needs a moment until it listens.
            answer.inspect_err(|_| thread::sleep(Duration::from_millis(100))).ok()
        });
        assert_eq!(answer.as_deref(), Some(&b"hello"[..]));
    });
}

/// Two queue pairs of a device, connected; the handle of the client, and of the server's if it is to be kept.
async fn connected(device: &Device, cq: &AsyncCq) -> [roce::Qp; 2] {
    let pd = device.alloc_pd().unwrap();
    let qp = || {
        let init = QpInit {
            send_cq: cq.cq(),
            recv_cq: cq.cq(),
            caps: QpCaps::default(),
            signal_all: false,
        };
        device.create_qp(&pd, &init).unwrap()
    };
    let (client, server) = (qp(), qp());
    let to = SocketAddr::new(device.addr(), 7000);
    let events = AsyncEventChannel::new(device).unwrap();
    let _listener = device.listen(events.channel(), to, 1).unwrap();
    let _id = device
        .connect(events.channel(), None, to, &client, ConnParams::default())
        .unwrap();
    let mut established = 0;
    while established < 2 {
        let event = in_time(events.next()).await.unwrap();
        match event.kind {
            CmEventKind::Request { .. } => event.id.accept(&server, ConnParams::default()).unwrap(),
            CmEventKind::Established { .. } => established += 1,
            other => panic!("{other:?}"),
        }
    }
    [client, server]
}

#[test]
fn a_task_waits_for_many_messages() {
    runtime().block_on(async {
        let device = open();
        let cq = AsyncCq::new(&device, 256).unwrap();
        let [client, server] = connected(&device, &cq).await;
        let memory = device
            .alloc_mr(&device.alloc_pd().unwrap(), 4096, AccessFlags::LOCAL_WRITE)
            .unwrap();
        // Nothing comes yet, and a wait that is given up takes nothing away.
        let mut out = Vec::new();
        let none = tokio::time::timeout(Duration::from_millis(20), cq.poll(&mut out, 8)).await;
        assert!(none.is_err() && out.is_empty());
        drop(memory);
        for round in 0..200 {
            server
                .post_recv(&[RecvWr {
                    wr_id: round,
                    sges: &[],
                }])
                .unwrap();
            let send = SendWr {
                wr_id: round,
                op: SendOp::Send,
                flags: SendFlags::SIGNALED,
                payload: Payload::Inline(&[]),
            };
            client.post_send(&[send]).unwrap();
            let mut out = Vec::new();
            while out.len() < 2 {
                in_time(cq.poll(&mut out, 8)).await.unwrap();
            }
            assert!(out.iter().all(|wc| wc.status == WcStatus::Success && wc.wr_id == round));
        }
    });
}

#[test]
fn a_device_that_closes_wakes_all() {
    runtime().block_on(async {
        let device = open();
        let cq = AsyncCq::new(&device, 16).unwrap();
        let (events, news) = (
            AsyncEventChannel::new(&device).unwrap(),
            AsyncEvents::new(&device).unwrap(),
        );
        let closing = device.clone();
        let close = async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            closing.close();
        };
        let mut out = Vec::new();
        let (_, polled, event, news) =
            in_time(async { tokio::join!(close, cq.poll(&mut out, 1), events.next(), news.next()) }).await;
        assert!(matches!(polled, Err(VerbsError::Closed)), "{polled:?}");
        assert!(matches!(event, Err(VerbsError::Closed)), "{event:?}");
        assert!(matches!(news, Err(VerbsError::Closed)), "{news:?}");
    });
}
