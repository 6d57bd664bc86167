// Makes images for the scripts of the clients.

// Returns an image of one pixel in the format GIF, as bytes. Images differ in their amount of red, from 0 to 255.
export function gif(red) {
  const file = Buffer.from("R0lGODlhAQABAPAAAAAAAAAAACwAAAAAAQABAAACAkQBADs=", "base64");
  file[13] = red;
  return file;
}

export function dataURL(file) {
  return `data:image/gif;base64,${file.toString("base64")}`;
}
