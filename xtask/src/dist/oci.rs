//! An OCI image layout without a base: other images copy its files, and the program runs in it as it is.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{Release, sha256, tar};
use crate::{
    Result,
    files::{self, failed, put},
};

/// A blob of the layout, as others refer to it.
fn blob(layout: &Path, media: &str, bytes: &[u8]) -> Result<Value> {
    let digest = sha256(bytes);
    put(&layout.join("blobs/sha256").join(&digest), bytes, 0o644)?;
    Ok(json!({
        "mediaType": format!("application/vnd.oci.image.{media}"),
        "digest": format!("sha256:{digest}"),
        "size": bytes.len(),
    }))
}

fn as_json(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// Writes the layout as one archive, `ferroce-VERSION-ARCHITECTURE.oci.tar`.
pub(super) fn layout(release: &Release) -> Result<()> {
    let (dir, _) = release.tree("oci", "/usr/local")?;
    let packed = release.work.join("layer.tar");
    tar::archive(&dir, &["usr"], &packed, release.epoch)?;
    let plain = sha256(&fs::read(&packed).map_err(failed(&packed))?);
    let packed = tar::gzip(&packed, release.gzip())?;
    let layer = fs::read(&packed).map_err(failed(&packed))?;

    let layout = release.work.join("layout");
    files::empty(&layout)?;
    let labels = json!({
        "org.opencontainers.image.title": "ferroce",
        "org.opencontainers.image.description": release.description,
        "org.opencontainers.image.version": release.version,
        "org.opencontainers.image.licenses": release.license,
        "org.opencontainers.image.source": release.homepage,
    });
    let config = json!({
        "architecture": release.architecture,
        "os": "linux",
        "config": {
            "Entrypoint": ["/usr/local/bin/ferroce"],
            "Env": ["PATH=/usr/local/bin"],
            "Labels": labels,
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{plain}")] },
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(&layout, "config.v1+json", &as_json(&config))?,
        "layers": [blob(&layout, "layer.v1.tar+gzip", &layer)?],
        "annotations": labels,
    });
    let mut described = blob(&layout, "manifest.v1+json", &as_json(&manifest))?;
    described["platform"] = json!({ "architecture": release.architecture, "os": "linux" });
    // The one is what containerd and Docker call it, the other is of OCI.
    described["annotations"] = json!({
        "io.containerd.image.name": format!("ferroce:{}", release.version),
        "org.opencontainers.image.ref.name": release.version,
    });
    let index =
        json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [described] });
    put(&layout.join("index.json"), &as_json(&index), 0o644)?;
    put(
        &layout.join("oci-layout"),
        &as_json(&json!({ "imageLayoutVersion": "1.0.0" })),
        0o644,
    )?;
    let name = format!("ferroce-{}-{}.oci.tar", release.version, release.architecture);
    // Readers that don't seek want this order.
    let entries = ["oci-layout", "index.json", "blobs"];
    tar::archive(&layout, &entries, &release.out.join(name), release.epoch)
}
