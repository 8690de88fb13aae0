//! What people see: lines that fit the terminal, tables, and a display that is redrawn in place.

mod line;
mod screen;
mod table;

pub(crate) use self::{
    line::{Line, Tone, wrap},
    screen::{Look, Screen},
    table::Table,
};
