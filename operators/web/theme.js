// Runs before the first paint. Airflow keeps the reader's choice of theme under this name; without one the system's counts.
"use strict";
function useTheme() {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}
useTheme();
addEventListener("storage", useTheme); // Airflow around this frame was switched
