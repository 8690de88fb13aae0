use std::{fs, path::PathBuf};

/// A directory that goes away with its test.
pub(super) struct Dir(PathBuf);

impl Dir {
    pub(super) fn new() -> Self {
        let n = rand::random::<u64>();
        let path = std::env::temp_dir().join(format!("tower-ttft-{n:x}"));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &std::path::Path {
        &self.0
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
